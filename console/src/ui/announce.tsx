// What is said to people who do not look at the page: one polite live region, and short messages that go away.
import { signal } from "@preact/signals";

interface Toast {
  id: number;
  text: string;
  kind: "done" | "error";
}

const spoken = signal("");
const toasts = signal<Toast[]>([]);
let nextId = 1;

/** Says something to screen readers only. */
export function announce(text: string): void {
  spoken.value = text;
}

/** Shows a message for a while. An error stays until it is closed. */
export function toast(text: string, kind: Toast["kind"] = "done"): void {
  const id = nextId++;
  toasts.value = [...toasts.value.slice(-3), { id, text, kind }];
  if (kind === "done") setTimeout(() => close(id), 6000);
}

function close(id: number): void {
  toasts.value = toasts.value.filter((t) => t.id !== id);
}

/** Where it is said. An open dialog needs one of its own: what is behind it is silent. */
export function Spoken() {
  return (
    <div class="sr-only" aria-live="polite" role="status">
      {spoken}
    </div>
  );
}

export function Announcer() {
  return (
    <>
      <Spoken />
      <div class="toasts" role="log" aria-live="polite" aria-label="Messages">
        {toasts.value.map((t) => (
          <div key={t.id} class={`toast ${t.kind}`}>
            <span>{t.text}</span>
            <button type="button" class="plain" aria-label="Close the message" onClick={() => close(t.id)}>
              {"\u00d7"}
            </button>
          </div>
        ))}
      </div>
    </>
  );
}
