"""The semantics lint of what was uploaded: are these log-probs what they are taken for?"""
