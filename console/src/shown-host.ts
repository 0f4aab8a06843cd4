// Which host of the fleet a page shows: `#/@NAME/machines`. Without a name it is the host that serves the page.
//
// Invariant: it stays the same for as long as the page lives: for another host the page is loaded anew, so that nothing of two hosts
// is ever mixed.

/** The host that a fragment names; null: none. */
export function hostOf(hash: string): string | null {
  return hash.match(/^#\/@([a-z0-9-]+)(?![^/?])/)?.[1] ?? null;
}

export const shownHost = hostOf(globalThis.location?.hash ?? "");

/**
 * Where the daemon that serves the page has what is at this path on the shown host. Sessions and the fleet are its own, whichever host
 * is shown.
 */
export function through(path: string, host = shownHost): string {
  return host && !/^\/v1\/(fleet|session)\b/.test(path) ? `/v1/fleet/hosts/${host}/api${path}` : path;
}
