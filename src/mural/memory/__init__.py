"""Memory: an image in tiles that follow each other on one device, with what is kept between the passes over them."""
