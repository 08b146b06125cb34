"""Implementations of other projects' interfaces by this package. Each module imports the project it is named after."""
