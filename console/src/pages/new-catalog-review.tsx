// The last step of the wizard: everything that the catalog would have, with the daemon's defaults, and the same as a command, a
// file or a request.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { CatalogSpec } from "../api/client.ts";
import { createCommand, curl, toml } from "../commands.ts";
import { type Draft, draft, name } from "../state/edits.ts";
import { Command, Facts, Panel } from "../ui/parts.tsx";
import { FIELDS, shown } from "../ui/spec-form.tsx";

export interface Setting {
  title: string;
  text: string;
  isDefault: boolean;
}

/** The settings that a catalog would have: those of the draft, and the daemon's defaults if they are known. */
export function settings(of: Draft, effective: CatalogSpec | null | undefined): Setting[] {
  return FIELDS.flatMap((field) => {
    const own = of[field.key];
    const value = own ?? effective?.[field.key];
    const text = field.key === "user_data" && value ? "given" : shown(field, value);
    return text === "" ? [] : [{ title: field.title, text, isDefault: own === undefined }];
  });
}

export function ReviewStep({ effective }: { effective: CatalogSpec | null | undefined }) {
  const all = settings(draft.value, effective);
  const [as, setAs] = useState("command");
  const body = { name: name.value, spec: draft.value };
  const text =
    as === "command"
      ? createCommand(name.value, draft.value)
      : as === "toml"
        ? toml(name.value, draft.value)
        : curl("POST", "/v1/catalogs", body);
  return (
    <>
      <Panel title="The catalog">
        <Facts
          items={[
            ["Name", name.value || "not set"],
            ["Image", draft.value.image ?? "not set"],
            ...all.map((s): [string, ComponentChildren] => [
              s.title,
              s.isDefault ? (
                <>
                  {s.text} <span class="muted">(default)</span>
                </>
              ) : (
                s.text
              ),
            ]),
          ]}
        />
        {effective ? null : (
          <p class="hint">The daemon's defaults are shown as soon as it has checked the draft.</p>
        )}
      </Panel>
      <Panel
        title="The same"
        aside={
          <label class="choice">
            <span class="sr-only">Form</span>
            <select value={as} onChange={(e) => setAs(e.currentTarget.value)}>
              <option value="command">as a command</option>
              <option value="toml">as a file for catalog apply</option>
              <option value="curl">as a request</option>
            </select>
          </label>
        }
      >
        <Command label={as === "toml" ? "catalog.toml" : "Shell"} text={text} />
      </Panel>
    </>
  );
}
