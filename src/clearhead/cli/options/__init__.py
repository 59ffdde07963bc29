"""The options of the commands that have many: what they are, and how help describes them."""
