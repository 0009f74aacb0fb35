"""How a plan is found: the methods a user may ask for, and the search over meshes, stages and schedules."""
