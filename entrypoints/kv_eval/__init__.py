"""What a KV cache format costs: texts, retrieval, answers in a form and GSM8K, each against a baseline format.

`evaluate.evaluate` is the door for other code; `halfbyte kv-eval` is its command. The shipped texts are in `texts/`:
`calibration_*.txt` is for fitting formats, the others are for judging them, and nothing is in both.
"""
