"""The trainable memory of a frozen backbone: mirror projections, how they are attached, and how they are stored."""
