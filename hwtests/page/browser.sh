# Finds a browser and what drives it, for the scripts beside this directory: sets `browser` and `packages`. They have a
# function `skip`, which says why they cannot run.
browser=${CHROMIUM:-$(command -v chromium || true)}
[ -n "$browser" ] || skip "no Chromium; install it (Debian: chromium) or name one in CHROMIUM"
python3 -m pip --version >/dev/null 2>&1 || skip "no pip (Debian: python3-pip)"

packages=target/page-packages
if [ ! -e "$packages/complete" ] || [ ! -e "$packages/axe_playwright_python" ]; then
    rm -rf "$packages"
    mkdir -p "$packages"
    if ! python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --target "$packages" \
        playwright==1.65.2 axe-playwright-python==0.1.8 2>"$packages/log"; then
        cat "$packages/log" >&2
        grep -qE 'Connection|Timeout|Temporary failure|Network is unreachable|ProxyError|No matching distribution' "$packages/log" || exit 1
        skip "playwright cannot be had here"
    fi
    touch "$packages/complete"
fi
