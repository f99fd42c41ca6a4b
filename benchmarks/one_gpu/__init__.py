"""One device, any image: what streaming costs against images in memory, to where each way ends."""
