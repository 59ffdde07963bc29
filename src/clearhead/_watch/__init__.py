"""How the attention calls of a model are intercepted, read and put together."""
