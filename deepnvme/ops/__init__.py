"""The compiled ops, by name, and their builders."""
