"""What changes in the user turn when the response, or the header, is changed?

The one experiment that samples: it knows how to change conversations, hands them to
:mod:`ia_mech.collect`, and compares what comes back with the runs that they were made from.
"""
