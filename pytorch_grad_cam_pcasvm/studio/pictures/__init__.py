"""Pictures: how photos are read and framed, and how maps are drawn over them. Needs only numpy and Pillow."""
