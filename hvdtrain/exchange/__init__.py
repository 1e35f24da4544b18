"""How the gradients of the data axis become one."""
