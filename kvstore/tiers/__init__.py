"""Where blocks lie, as pure accounting: device, host, disk, and which of them goes next."""
