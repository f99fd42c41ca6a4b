"""Every drawing and page: graphs of models, timelines, collectives, profiles and the demo's picture."""
