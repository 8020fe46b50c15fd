"""A tool as verl's agent loop takes it: a subclass of its BaseTool, named in tools.yaml."""

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Safe(BaseTool):
    """A safe opens at the right number; each try is answered by whether it is higher or lower."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.safes = {}

    async def create(self, instance_id=None, create_kwargs=None, **kwargs):
        self.safes[instance_id] = {"number": create_kwargs["number"], "tries": 0, "open": False}
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        safe = self.safes[instance_id]
        safe["tries"] += 1
        if parameters["number"] == safe["number"]:
            safe["open"] = True
            return ToolResponse(text="The safe opens."), 0.0, {}
        hint = "Higher." if parameters["number"] < safe["number"] else "Lower."
        return ToolResponse(text=hint), -float(self.config["cost"]), {}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.safes[instance_id]["open"])

    async def release(self, instance_id, **kwargs):
        del self.safes[instance_id]
