// The dialog of an act: it names what will happen and what is lost, shows the equal command, and carries the act out.
//
// Invariant: at most one dialog is open. Whoever closes it has changed nothing. Where data that is kept would be lost, the
// name has to be typed first.
import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { words } from "../api/client.ts";
import { refresh } from "../state/resource.ts";
import { toast } from "./announce.tsx";
import { Command } from "./parts.tsx";

export interface Act {
  title: string;
  /** What happens, a sentence each. The first says the most important. */
  consequences: ComponentChildren[];
  /** The verb of the button that does it. */
  verb: string;
  isDestructive?: boolean;
  /** Has to be typed before the act: where something that is kept is lost. */
  typed?: string;
  command: string;
  run(): Promise<unknown>;
  /** What to say afterwards. */
  done: string;
  /** Where to go afterwards. */
  after?(): void;
}

const open = signal<Act | null>(null);

/** Asks before an act. */
export function ask(act: Act): void {
  open.value = act;
}

export function ActDialog() {
  const act = open.value;
  const ref = useRef<HTMLDialogElement>(null);
  const [state, setState] = useState<{ busy: boolean; error: string | null; typed: string }>({
    busy: false,
    error: null,
    typed: "",
  });
  useEffect(() => {
    setState({ busy: false, error: null, typed: "" });
    if (act && ref.current && !ref.current.open) ref.current.showModal();
  }, [act]);
  if (!act) return null;
  const close = () => {
    ref.current?.close();
    open.value = null;
  };
  const run = async () => {
    setState((s) => ({ ...s, busy: true, error: null }));
    try {
      await act.run();
      close();
      toast(act.done);
      refresh();
      act.after?.();
    } catch (error) {
      setState((s) => ({ ...s, busy: false, error: words(error) }));
    }
  };
  const isReady = !state.busy && (act.typed === undefined || state.typed === act.typed);
  return (
    <dialog
      ref={ref}
      class="act"
      aria-labelledby="act-title"
      onCancel={(e) => {
        e.preventDefault();
        if (!state.busy) close();
      }}
    >
      <form
        method="dialog"
        onSubmit={(e) => {
          e.preventDefault();
          if (isReady) void run();
        }}
      >
        <h2 id="act-title">{act.title}</h2>
        <ul class="consequences">
          {act.consequences.map((line, i) => (
            // The lines of an act never change their order
            <li key={i}>{line}</li>
          ))}
        </ul>
        {act.typed !== undefined ? (
          <label class="field">
            <span>
              Type <code>{act.typed}</code> to confirm
            </span>
            <input
              type="text"
              autocomplete="off"
              spellcheck={false}
              value={state.typed}
              onInput={(e) => {
                const typed = e.currentTarget.value;
                setState((s) => ({ ...s, typed }));
              }}
            />
          </label>
        ) : null}
        <Command text={act.command} />
        {state.error ? (
          <div class="notice critical" role="alert">
            <strong>Refused.</strong> {state.error}
          </div>
        ) : null}
        <footer>
          <button type="button" onClick={close} disabled={state.busy}>
            Cancel
          </button>
          <button type="submit" class={act.isDestructive ? "danger" : "primary"} disabled={!isReady}>
            {state.busy ? "Working" : act.verb}
          </button>
        </footer>
      </form>
    </dialog>
  );
}
