"""Object detection: boxes, the choice among them, pooling over regions, YOLO heads."""
