"""`halfbyte kv-plan`: what each KV format would make of a given amount of memory, from a model's configuration alone."""
