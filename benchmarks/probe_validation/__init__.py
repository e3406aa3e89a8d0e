"""Does the probe methodology keep its promises? Synthetic runs of known truth, analysed."""
