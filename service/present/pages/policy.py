"""What a browser may do with a page: scripts from this service only, nothing inline, no frames, no referrer."""

from __future__ import annotations

# Plotly sets style attributes on what it draws, and puts an empty <style> into the page, whose rules it adds by script:
# the first hash is that of the empty text. The second is the style of its map library, which plotly.js 4 adds when it
# is loaded, maps or not; with another version the browser refuses it, and nothing that these pages draw misses it.
PLOTLY_STYLES = (
    "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=' 'sha256-ji27qzEtxXZW+7dun6UwjHXJ18e6WAin1VvNtkzIE/o='"
)

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        f"style-src-elem 'self' {PLOTLY_STYLES}",
        "style-src-attr 'unsafe-inline'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)

PAGE_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
