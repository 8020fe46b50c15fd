"""ALFWorld: household tasks in text; games come with `alfworld-download`."""

ENVIRONMENT = "environment:AlfworldEnvironment"
INSTALL = "pip install alfworld"
