"""mural trains vision models on images too large for one device, exactly as one device would."""
