// The dialog of an act: it names what will happen and what is lost, shows the equal command, and carries the act out.
//
// Invariant: at most one dialog is open, and none is opened over the cover of an ended session. Whoever closes it has changed nothing.
// Where data that is kept would be lost, the name has to be typed first.
import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { ApiError, words } from "../api/client.ts";
import { PartlyDone } from "../pieces.ts";
import { pageKey } from "../router.ts";
import { refresh } from "../state/resource.ts";
import { isSignedIn } from "../state/session.ts";
import { Spoken, toast } from "./announce.tsx";
import { Command, Labelled } from "./parts.tsx";

export interface Act {
  title: string;
  /** What happens, a sentence each. The first says the most important. */
  consequences: ComponentChildren[];
  /** The verb of the button that does it. */
  verb: string;
  isDestructive?: boolean;
  /** Has to be typed before the act: where something that is kept is lost. */
  typed?: string;
  /** What has to be filled in first. */
  fields?: ActField[];
  command: string | ((values: Values) => string);
  run(values: Values): Promise<unknown>;
  /** What to say afterwards, with what the act has returned. */
  done: string | ((result: unknown) => string);
  /** Where to go afterwards. */
  after?(result: unknown): void;
}

export interface ActField {
  key: string;
  label: string;
  hint?: string;
  placeholder?: string;
  isRequired?: boolean;
  /** Words and their texts, for a choice; the first is chosen at the start. */
  options?: [string, string][];
  /** Why a value is not allowed, in words. */
  check?(value: string): string | null;
}

/** What was filled in, by the keys of the fields; empty if nothing was. */
export type Values = Record<string, string>;

const initial = (act: Act | null): Values =>
  Object.fromEntries((act?.fields ?? []).map((f) => [f.key, f.options?.[0]?.[0] ?? ""]));

const open = signal<Act | null>(null);

/** What an act that has failed has become, in a word or two; empty if the message says it. */
export function headingOf(error: unknown): string {
  if (error instanceof ApiError) return "Refused.";
  return error instanceof PartlyDone ? "" : "Not known whether it was done.";
}

/** Asks before an act, unless the session has ended while it was found out. */
export function ask(act: Act): void {
  if (isSignedIn.peek()) open.value = act;
}

export function ActDialog() {
  const act = open.value;
  const ref = useRef<HTMLDialogElement>(null);
  const submit = useRef<HTMLButtonElement>(null);
  const [state, setState] = useState({
    busy: false,
    error: null as { heading: string; text: string } | null,
    typed: "",
    values: initial(act),
  });
  const key = pageKey.value;
  useEffect(() => {
    // Another page, another matter.
    open.value = null;
  }, [key]);
  // At once: a session that ends from now on covers what is open.
  useLayoutEffect(() => {
    setState({ busy: false, error: null, typed: "", values: initial(act) });
    if (act && ref.current && !ref.current.open) ref.current.showModal();
  }, [act]);
  // The button was disabled while the act was under way, and has lost the focus.
  useLayoutEffect(() => {
    if (state.error !== null) submit.current?.focus();
  }, [state.error]);
  if (!act) return null;
  /** The dialog is closed. The browser has given the focus back to where it was. If that cannot have it any more, the title gets it. */
  const closed = () => {
    open.value = null;
    const { activeElement, body } = document;
    if (activeElement === body || ref.current?.contains(activeElement))
      document.getElementById("page-title")?.focus();
  };
  const close = () => {
    ref.current?.close();
    closed();
  };
  // Spaces around a value are left out, but not while it is typed.
  const values = Object.fromEntries(Object.entries(state.values).map(([key, value]) => [key, value.trim()]));
  const run = async () => {
    setState((s) => ({ ...s, busy: true, error: null }));
    try {
      const result = await act.run(values);
      toast(typeof act.done === "string" ? act.done : act.done(result));
      refresh();
      // Who has left the page meanwhile, or asks for something else, stays there.
      if (open.peek() !== act) return;
      close();
      act.after?.(result);
    } catch (error) {
      if (open.peek() !== act) {
        // Another dialog is open by now, or none.
        toast(`${act.title} ${words(error)}`, "error");
        return;
      }
      // What it was decided on may have changed: the page behind shows it as it is now.
      refresh();
      setState((s) => ({ ...s, busy: false, error: { heading: headingOf(error), text: words(error) } }));
    }
  };
  const fields = act.fields ?? [];
  const wrong = (f: ActField) => {
    const value = values[f.key] ?? "";
    if (value === "") return f.isRequired ? "" : null;
    return f.check?.(value) ?? null;
  };
  const isReady =
    !state.busy &&
    (act.typed === undefined || state.typed === act.typed) &&
    fields.every((f) => wrong(f) === null);
  const set = (field: string, value: string) =>
    setState((s) => ({ ...s, values: { ...s.values, [field]: value } }));
  return (
    <dialog
      ref={ref}
      class="act"
      aria-labelledby="act-title"
      onCancel={(e) => {
        e.preventDefault();
        close();
      }}
      // A browser may also close it by itself. What is under way then tells its result in a toast.
      onClose={() => {
        if (open.peek() === act) closed();
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
            // The lines of an act never change their order.
            <li key={i}>{line}</li>
          ))}
        </ul>
        {fields.length ? (
          <div class="fields">
            {fields.map((f) => (
              <Labelled key={f.key} label={f.label} hint={wrong(f) || f.hint}>
                {(id) =>
                  f.options ? (
                    <select
                      id={id}
                      aria-describedby={wrong(f) || f.hint ? `${id}-hint` : undefined}
                      aria-invalid={Boolean(wrong(f))}
                      value={state.values[f.key]}
                      onChange={(e) => set(f.key, e.currentTarget.value)}
                    >
                      {f.options.map(([value, text]) => (
                        <option key={value} value={value}>
                          {text}
                        </option>
                      ))}
                    </select>
                  ) : (
                    <input
                      id={id}
                      type="text"
                      autocomplete="off"
                      spellcheck={false}
                      placeholder={f.placeholder}
                      required={f.isRequired}
                      aria-describedby={wrong(f) || f.hint ? `${id}-hint` : undefined}
                      aria-invalid={Boolean(wrong(f))}
                      value={state.values[f.key] ?? ""}
                      onInput={(e) => set(f.key, e.currentTarget.value)}
                    />
                  )
                }
              </Labelled>
            ))}
          </div>
        ) : null}
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
        <Command text={typeof act.command === "string" ? act.command : act.command(values)} />
        {state.error ? (
          <div class="notice critical" role="alert">
            {state.error.heading ? <strong>{state.error.heading}</strong> : null} {state.error.text}
          </div>
        ) : null}
        <footer>
          <button type="button" onClick={close}>
            {state.busy ? "Close" : "Cancel"}
          </button>
          <button
            ref={submit}
            type="submit"
            class={act.isDestructive ? "danger" : "primary"}
            disabled={!isReady}
          >
            {state.busy ? "Working" : act.verb}
          </button>
        </footer>
      </form>
      <Spoken />
    </dialog>
  );
}
