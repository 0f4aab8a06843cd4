// Settings of a catalog, by when a change takes effect. A change is checked by the daemon before it is offered.
//
// Invariant: what is sent is what was read, with the changes; if somebody else has changed the catalog, nothing is.
import { useSignal } from "@preact/signals";
import { useState } from "preact/hooks";
import { ask, changeAct, putCatalog } from "../acts.ts";
import type { Catalog, CatalogSpec, Store } from "../api/client.ts";
import { toml } from "../commands.ts";
import { useDryRun } from "../state/dry-run.ts";
import { useList } from "../state/resource.ts";
import { can } from "../state/session.ts";
import { plural } from "../ui/format.ts";
import { Command, Notice, Panel } from "../ui/parts.tsx";
import {
  aboutOf,
  type Draft,
  type Effect,
  FIELDS,
  type Key,
  SpecField,
  shown,
  type Wrong,
  wrongText,
} from "../ui/spec-form.tsx";

const GROUPS: [Effect, string][] = [
  ["at once", "Changes apply at once, to running machines too"],
  ["at the next start", "Changes apply at the next start of each machine"],
  ["cannot be changed", "Cannot be changed"],
];

const same = (a: unknown, b: unknown) => JSON.stringify(a ?? null) === JSON.stringify(b ?? null);

export function CatalogSettings({ catalog }: { catalog: Catalog }) {
  const stores = useList<Store>("/v1/stores");
  const [changes, setChanges] = useState<Draft>({});
  const draft: Draft = { ...catalog.spec, ...changes };
  const wrong = useSignal<Wrong>({});
  // Fields begin anew when all changes are discarded.
  const [round, setRound] = useState(0);
  const incorrect = wrongText(wrong.value);
  const keys = (Object.keys(changes) as Key[]).filter((key) => !same(catalog.spec[key], changes[key]));
  const diff = Object.fromEntries(keys.map((key) => [key, changes[key]])) as Partial<CatalogSpec>;
  const isRedacted = (catalog.spec.redacted ?? []).length > 0;
  const isEditable = can("admin") && !isRedacted;
  const checked = useDryRun(
    keys.length && !incorrect
      ? JSON.stringify([catalog.name, catalog.revision, keys.map((key) => [key, changes[key] ?? null])])
      : null,
    async () => (await putCatalog(catalog, diff, true)).body,
  );
  const change = (key: Key, value: unknown) => setChanges((c) => ({ ...c, [key]: value }));
  const effects = keys.map((key) => {
    const field = FIELDS.find((f) => f.key === key);
    const text = (v: unknown) => (field ? shown(field, v) || "not set" : String(v));
    const isHidden = key === "user_data";
    return `${field?.title ?? key}: ${isHidden ? "changed" : `${text(catalog.spec[key])} becomes ${text(changes[key])}`}, ${aboutOf(key).effect}.`;
  });
  return (
    <>
      {isRedacted ? (
        <Notice>
          Your role may not read {catalog.spec.redacted?.join(" and ")}, so settings cannot be changed here.
        </Notice>
      ) : null}
      {GROUPS.map(([effect, title]) => (
        <Panel key={effect} title={title}>
          {isEditable && effect !== "cannot be changed" ? (
            <div class="fields">
              {FIELDS.filter((f) => aboutOf(f.key).effect === effect).map((f) => (
                <SpecField
                  key={`${f.key} ${round}`}
                  field={f}
                  draft={draft}
                  change={change}
                  wrong={wrong}
                  stores={(stores.data ?? []).map((s) => s.name)}
                />
              ))}
            </div>
          ) : (
            <dl class="facts">
              {FIELDS.filter((f) => aboutOf(f.key).effect === effect).map((f) => (
                <div key={f.key}>
                  <dt>{f.title}</dt>
                  <dd title={aboutOf(f.key).about}>
                    {shown(f, catalog.spec[f.key]) || <span class="muted">not set</span>}
                  </dd>
                </div>
              ))}
            </dl>
          )}
        </Panel>
      ))}
      <Panel title="As a file">
        <Command label="For spillway catalog apply" text={toml(catalog.name, catalog.spec)} />
      </Panel>
      {keys.length || incorrect ? (
        <div class="savebar" role="region" aria-label="Changes">
          <div>
            <strong>{plural(keys.length, "setting")} changed</strong>{" "}
            {incorrect ? (
              <span class="critical-text">{incorrect}</span>
            ) : checked === null ? (
              <span class="muted">The daemon checks it</span>
            ) : "error" in checked ? (
              <span class="critical-text">{checked.error}</span>
            ) : (
              checked.answer.warnings.map((w) => (
                <span key={w} class="warning-text">
                  {w}{" "}
                </span>
              ))
            )}
          </div>
          <div class="acts">
            <button
              type="button"
              onClick={() => {
                setChanges({});
                wrong.value = {};
                setRound((n) => n + 1);
              }}
            >
              Discard
            </button>
            <button
              type="button"
              class="primary"
              disabled={Boolean(incorrect) || checked === null || "error" in checked}
              onClick={() => ask(changeAct(catalog, diff, `Change ${catalog.name}?`, effects))}
            >
              Review and apply
            </button>
          </div>
        </div>
      ) : null}
    </>
  );
}
