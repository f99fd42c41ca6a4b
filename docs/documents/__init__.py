"""The documents that mural grew out of, claim by claim: rows as data, with numbers that are looked up in results."""
