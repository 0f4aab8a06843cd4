// What settings are, in the words of the API: a file of its own, which is read when a page first shows a setting.
//
// Invariant: a file that could not be read is read again when another setting is shown. Without it, fields have their titles alone.
import { signal } from "@preact/signals";
import type { Key } from "../state/edits.ts";

const hints = signal<Record<string, string>>({});
let isAsked = false;

/** What a setting is; empty until that is known. */
export function hintOf(key: Key): string {
  if (!isAsked) void read();
  return hints.value[key] ?? "";
}

async function read(): Promise<void> {
  isAsked = true;
  try {
    hints.value = await (await fetch(new URL("hints.json", document.baseURI))).json();
  } catch {
    isAsked = false;
  }
}
