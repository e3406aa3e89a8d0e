"""How likely given user turns are: at many temperatures, after other responses, among rivals."""
