// Signing in with a token. The token is sent once, and the daemon answers with a cookie that this page cannot read.
import { useState } from "preact/hooks";
import { words } from "../api/client.ts";
import { login } from "../state/session.ts";

export function LoginPage({ why }: { why: "never" | "ended" }) {
  const [error, setError] = useState<string | null>(null);
  const [busy, setBusy] = useState(false);
  return (
    <main class="login" id="main">
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
        <h1 id="page-title" tabIndex={-1}>
          Spillway
        </h1>
        <p>
          {why === "ended" ? "The session has ended. Sign in again." : "Sign in with a token of this host."}
        </p>
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
          Ask an administrator of the host for one, who makes it with <code>spillway token new</code>. This
          page does not store it.
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
    </main>
  );
}
