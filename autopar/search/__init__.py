"""Planning: the methods that a user may ask for, and the search over meshes, stages and schedules."""
