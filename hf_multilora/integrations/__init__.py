"""Other libraries' classes with a MultiLoRAModel inside. Nothing is imported here: each module needs its library."""
