"""Client data: flat storage and on-device sampling."""
