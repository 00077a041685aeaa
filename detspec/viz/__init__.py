"""Parts of pictures, and how pictures are saved."""
