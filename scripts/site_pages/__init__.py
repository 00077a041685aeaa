"""Makes the pages of the documentation, and checks the site that is built from them."""
