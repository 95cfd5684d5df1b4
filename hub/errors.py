class UploadError(ValueError):
    """A folder cannot be uploaded, or an upload failed; the message says why and what to do."""
