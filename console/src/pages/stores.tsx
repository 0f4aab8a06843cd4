// Stores, registries, and files that deleted machines have left.

import { useState } from "preact/hooks";
import { ask } from "../acts.ts";
import { api, type Schemas, type Store, words } from "../api/client.ts";
import { line } from "../commands.ts";
import { figures } from "../state/figures.ts";
import { useList } from "../state/resource.ts";
import { can } from "../state/session.ts";
import { now } from "../state/visible.ts";
import { ago, bytes, count, duration } from "../ui/format.ts";
import { Badge, Empty, Facts, Notice, PageHead, Panel, Pending } from "../ui/parts.tsx";
import { Gauge } from "../ui/planes.tsx";
import { type Column, Table } from "../ui/table.tsx";

type Registry = Schemas["Registry"];
type Leftover = Schemas["Leftover"];

const STORES: Column<Store>[] = [
  { key: "name", title: "Store", sort: (s) => s.name, cell: (s) => s.name },
  { key: "class", title: "Class", sort: (s) => s.class, cell: (s) => s.class },
  {
    key: "level",
    title: "Level",
    cell: (s) =>
      s.space ? (
        <Badge tone={s.space.level === "normal" ? "plain" : s.space.level}>{s.space.level}</Badge>
      ) : (
        <Badge tone="critical">no answer</Badge>
      ),
  },
  {
    key: "free",
    title: "Free",
    isFigure: true,
    sort: (s) => s.space?.free_bytes,
    cell: (s) => (s.space ? bytes(s.space.free_bytes) : "-"),
  },
  {
    key: "size",
    title: "Size",
    isFigure: true,
    sort: (s) => s.space?.total_bytes,
    cell: (s) => (s.space ? bytes(s.space.total_bytes) : "-"),
  },
  {
    key: "full",
    title: "Full in",
    isFigure: true,
    sort: (s) => (s.space?.seconds_to_full == null ? null : -s.space.seconds_to_full),
    cell: (s) => (s.space?.seconds_to_full == null ? "-" : duration(s.space.seconds_to_full)),
  },
  { key: "path", title: "Folder", isWide: true, cell: (s) => <code>{s.path}</code> },
];

export function StoresPage() {
  const stores = useList<Store>("/v1/stores");
  const registries = useList<Registry>("/v1/registries");
  const leftovers = useList<Leftover>("/v1/leftovers");
  const stream = figures.value?.stream;
  return (
    <>
      <PageHead title="Stores and registries" />
      <Panel title="Stores" flush>
        {stores.data ? (
          <Table
            label="Stores"
            rows={stores.data}
            columns={STORES}
            id={(s) => s.name}
            initial="name"
            empty="There are no stores."
          />
        ) : (
          <Pending error={stores.error} what="the stores" />
        )}
      </Panel>
      {stream ? (
        <Panel title="Cache of streamed images">
          <Gauge name="Cache" plane="base" used={stream.used_bytes} limit={stream.limit_bytes} />
          <Facts
            items={[
              ["Being brought", `${count(stream.inflight)} chunks`],
              ["From registries", bytes(stream.counters.store_bytes ?? 0)],
              ["From other hosts", bytes(stream.counters.peer_bytes ?? 0)],
              ["Passed and not kept", `${count(stream.counters.passed_chunks ?? 0)} chunks`],
              ["Wrong", `${count(stream.counters.wrong_chunks ?? 0)} chunks`],
            ]}
          />
        </Panel>
      ) : null}
      <Panel title="Registries">
        {registries.data ? (
          registries.data.length ? (
            <ul class="plain-list">
              {registries.data.map((r) => (
                <RegistryLine key={r.name} registry={r} />
              ))}
            </ul>
          ) : (
            <Empty>
              There are no registries. Add one with <code>spillway registry add NAME URL</code>
            </Empty>
          )
        ) : (
          <Pending error={registries.error} what="the registries" />
        )}
      </Panel>
      {leftovers.data?.length ? <Leftovers leftovers={leftovers.data} /> : null}
    </>
  );
}

function RegistryLine({ registry }: { registry: Registry }) {
  const [state, setState] = useState<"idle" | "busy" | Schemas["RegistryCheck"] | { error: string }>("idle");
  const check = async () => {
    setState("busy");
    try {
      setState((await api.post("/v1/registries/{name}/check", { path: { name: registry.name } })).body);
    } catch (error) {
      setState({ error: words(error) });
    }
  };
  return (
    <li>
      <div class="counts">
        <strong>{registry.name}</strong> <code>{registry.url}</code>
        {registry.require_signature?.length ? <Badge>signed images only</Badge> : null}
        <button type="button" disabled={!can("admin") || state === "busy"} onClick={() => void check()}>
          Check
        </button>
      </div>
      <div aria-live="polite">
        {typeof state === "object" && "error" in state ? (
          <Notice tone="critical">{state.error}</Notice>
        ) : null}
        {typeof state === "object" && "images" in state ? (
          <Notice tone={state.is_registry ? "good" : "warning"}>
            {state.is_registry ? "There is a registry" : "There is no registry at the address"},{" "}
            {state.can_write ? "it can be written" : "it can only be read"}:{" "}
            {state.images.join(", ") || "no images"}
          </Notice>
        ) : null}
      </div>
    </li>
  );
}

function Leftovers({ leftovers }: { leftovers: Leftover[] }) {
  const columns: Column<Leftover>[] = [
    { key: "machine", title: "Machine", sort: (l) => l.machine, cell: (l) => l.machine },
    { key: "catalog", title: "Catalog", sort: (l) => l.catalog, cell: (l) => l.catalog },
    {
      key: "deleted",
      title: "Deleted",
      isFigure: true,
      sort: (l) => Date.parse(l.deleted),
      cell: (l) => ago(l.deleted, now.value),
    },
    {
      key: "size",
      title: "Space",
      isFigure: true,
      sort: (l) => l.allocated_bytes,
      cell: (l) => (l.allocated_bytes == null ? "not known" : bytes(l.allocated_bytes)),
    },
    {
      key: "path",
      title: "Files",
      isWide: true,
      cell: (l) => <code class="clip">{[l.disk?.path, l.data_disk].filter(Boolean).join(", ")}</code>,
    },
    {
      key: "acts",
      title: "Acts",
      cell: (l) => (
        <button
          type="button"
          class="danger-plain"
          disabled={!can("admin")}
          onClick={() =>
            ask({
              title: `Delete what ${l.machine} left?`,
              consequences: [
                "The data that the machine kept is gone for good.",
                `It is the only copy on this host: ${l.allocated_bytes == null ? "its size is not known" : bytes(l.allocated_bytes)}.`,
              ],
              verb: "Delete",
              isDestructive: true,
              typed: l.machine,
              command: line("spillway", "leftover", "delete", l.uuid),
              run: () => api.delete("/v1/leftovers/{uuid}", { path: { uuid: l.uuid } }),
              done: `What ${l.machine} left is deleted.`,
            })
          }
        >
          Delete
        </button>
      ),
    },
  ];
  return (
    <Panel title="Leftovers" aside="data of machines that were deleted" flush>
      <Table
        label="Leftovers"
        rows={leftovers}
        columns={columns}
        id={(l) => l.uuid}
        initial="deleted"
        sortName="leftovers"
        empty=""
      />
    </Panel>
  );
}
