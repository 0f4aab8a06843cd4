// Signing in with a token: on a page of its own, and over a page whose session has ended. The token is sent once, and the daemon answers
// with a cookie that this page cannot read.
//
// Invariant: over a page, nothing of it can be seen, used or read to anybody, as nobody knows who sits there; and nothing of it changes.
import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { words } from "../api/client.ts";
import { hasEnded, login, session } from "../state/session.ts";

function TokenForm({ children }: { children: ComponentChildren }) {
  const [error, setError] = useState<string | null>(null);
  const [busy, setBusy] = useState(false);
  return (
    <form
      onSubmit={async (e) => {
        e.preventDefault();
        const field = e.currentTarget.elements.namedItem("token") as HTMLInputElement;
        const token = field.value.trim();
        setBusy(true);
        setError(null);
        try {
          await login(token);
        } catch (failure) {
          setError(words(failure));
          setBusy(false);
          field.focus();
        }
      }}
    >
      {children}
      <label class="field">
        <span>Token</span>
        <input
          name="token"
          type="password"
          autocomplete="current-password"
          required
          aria-describedby="token-about"
          {...(error ? { "aria-invalid": true } : {})}
        />
      </label>
      <p class="hint" id="token-about">
        Ask an administrator of the host for one, who makes it with <code>spillway token new</code>. This page
        does not store it.
      </p>
      {error ? (
        <div class="notice critical" role="alert">
          {error}
        </div>
      ) : null}
      <button type="submit" class="primary" disabled={busy}>
        {busy ? "Signing in" : "Sign in"}
      </button>
    </form>
  );
}

export function LoginPage() {
  return (
    <main class="login" id="main">
      <TokenForm>
        <h1 id="page-title" tabIndex={-1}>
          Spillway
        </h1>
        <p>Sign in with a token of this host.</p>
      </TokenForm>
    </main>
  );
}

/** Covers a page whose session has ended, until somebody signs in. */
export function SignInAgain() {
  return hasEnded.value ? <EndedDialog /> : null;
}

/** A second Escape would close this dialog, and a third the one below it. */
function holdEscape(event: KeyboardEvent): void {
  if (event.key === "Escape") event.preventDefault();
}

function EndedDialog() {
  const ref = useRef<HTMLDialogElement>(null);
  useLayoutEffect(() => {
    const dialog = ref.current;
    dialog?.showModal();
    document.addEventListener("keydown", holdEscape, { capture: true });
    return () => {
      document.removeEventListener("keydown", holdEscape, { capture: true });
      // The browser gives the focus back to where it was. If that cannot have it any more, what is open below gets it.
      dialog?.close();
      const { activeElement } = document;
      if (activeElement !== document.body && !dialog?.contains(activeElement)) return;
      const below = document.querySelector<HTMLElement>("dialog[open] [type=submit]");
      (below ?? document.getElementById("page-title"))?.focus();
    };
  }, []);
  const state = session.value;
  return (
    <dialog
      ref={ref}
      class="login ended"
      aria-labelledby="ended-title"
      onCancel={(e) => e.preventDefault()}
      // Other gestures of a browser may close it all the same.
      onClose={() => {
        if (hasEnded.peek()) ref.current?.showModal();
      }}
    >
      <TokenForm>
        <h2 id="ended-title">Your session has ended</h2>
        {state.is === "in" ? (
          <p>
            Sign in as <code>{state.session.caller}</code> ({state.session.role}) to go on where you were.
            With another token the page begins anew, and what is filled in is lost.
          </p>
        ) : null}
      </TokenForm>
    </dialog>
  );
}
