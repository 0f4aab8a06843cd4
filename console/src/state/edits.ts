// What people have filled in and not applied yet: the draft of a new catalog, and changes of settings. Kept while the page lives,
// so that going elsewhere in the console loses nothing. Before the page itself is left, the browser asks.
//
// Invariant: nothing of it is there for another caller, as a draft may contain secrets: between two, the page is loaded anew, and
// nothing holds it back.
import { type Signal, signal } from "@preact/signals";
import { type CatalogSpec, newKey } from "../api/client.ts";
import { isOver } from "./session.ts";

export type Key = Exclude<keyof CatalogSpec, "redacted">;
export type Draft = Partial<CatalogSpec>;
/** Text of fields that is no value. */
export type Wrong = Partial<Record<Key, string>>;

/** The new catalog. */
export const name = signal("");
export const draft = signal<Draft>({});
export const wrong = signal<Wrong>({});

/** Sets a setting of the new catalog; undefined: it is absent. */
export function changeDraft(key: Key, value: unknown): void {
  const next: Record<string, unknown> = { ...draft.value };
  if (value === undefined || value === "") delete next[key];
  else next[key] = value;
  draft.value = next as Draft;
}

let sent = { text: "", key: "" };

/** The Idempotency-Key of the draft: another one for another draft, so that a lost answer can be asked for again. */
export function draftKey(): string {
  const text = JSON.stringify([name.value, draft.value]);
  if (sent.text !== text) sent = { text, key: newKey() };
  return sent.key;
}

export function clearDraft(): void {
  name.value = "";
  draft.value = {};
  wrong.value = {};
  sent = { text: "", key: "" };
}

/** Changes of a catalog's settings. */
export interface Edits {
  changes: Signal<Draft>;
  wrong: Signal<Wrong>;
}

const edits = new Map<string, Edits>();

export function editsOf(catalog: string): Edits {
  let found = edits.get(catalog);
  if (!found) {
    found = { changes: signal({}), wrong: signal({}) };
    edits.set(catalog, found);
  }
  return found;
}

export function clearEdits(of: Edits): void {
  of.changes.value = {};
  of.wrong.value = {};
}

/** Whether two values of a setting are the same; one that is absent is null in responses. */
export function isSame(a: unknown, b: unknown): boolean {
  return JSON.stringify(a ?? null) === JSON.stringify(b ?? null);
}

/** The changes that differ from what a catalog has. */
export function differing(changes: Draft, spec: CatalogSpec): Draft {
  return Object.fromEntries(
    Object.entries(changes).filter(([key, value]) => !isSame(spec[key as Key], value)),
  );
}

/** Whether something would be lost with the page, which is not about to be loaded anew. */
export function isUnsaved(): boolean {
  const isFilled = (of: object) => Object.keys(of).length > 0;
  const isEdited = [...edits.values()].some((of) => isFilled(of.changes.peek()) || isFilled(of.wrong.peek()));
  const isDrafted = name.peek() !== "" || isFilled(draft.peek()) || isFilled(wrong.peek());
  return !isOver.peek() && (isEdited || isDrafted);
}

addEventListener("beforeunload", (event) => {
  if (isUnsaved()) event.preventDefault();
});
