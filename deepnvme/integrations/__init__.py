"""Other projects' interfaces, served by this package. Each module imports the project that it is named after."""
