"""What other libraries' trainers need beyond the optimizer: one module each, imported by its user.

`import zeroshard` imports none of them, and none of them another.
"""
