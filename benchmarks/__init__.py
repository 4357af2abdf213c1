"""Speed and memory, side by side with the alternative in one run; results/ keeps the figures with their machine."""
