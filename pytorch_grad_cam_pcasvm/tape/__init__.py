"""What torch's dispatcher runs between target layers and features, as a flat list of steps."""
