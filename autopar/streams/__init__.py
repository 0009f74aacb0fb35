"""What each mesh does in one step: instructions, the schedules that order them, checked and put on a clock."""
