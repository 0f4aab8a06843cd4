// Stores with their space and what is on them, the cache of streamed images, registries, and what deleted machines have left.

import { ask } from "../acts.ts";
import type { Catalog, Image, Schemas, Store } from "../api/client.ts";
import { spaceText } from "../image-words.ts";
import { addStore } from "../registry-acts.ts";
import { figures } from "../state/figures.ts";
import { useList } from "../state/resource.ts";
import { can } from "../state/session.ts";
import { bytes, count, duration, percent } from "../ui/format.ts";
import { NeedsAdmin } from "../ui/offers.tsx";
import { Badge, Facts, Notice, PageHead, Panel, Pending } from "../ui/parts.tsx";
import { Gauge } from "../ui/planes.tsx";
import { silent } from "./host-troubles.tsx";
import { Leftovers } from "./leftovers.tsx";
import { Registries } from "./registries.tsx";
import { contents, useAllVersions } from "./store-contents.ts";
import "../style/images.css";

type Leftover = Schemas["Leftover"];

export function StoresPage() {
  const stores = useList<Store>("/v1/stores");
  const leftovers = useList<Leftover>("/v1/leftovers");
  const images = useAllVersions(useList<Image>("/v1/images").data);
  const catalogs = useList<Catalog>("/v1/catalogs").data;
  const stream = figures.value?.stream;
  const unanswered = silent(stores.data, figures.value?.stores);
  const isKnown = images && catalogs && stores.data && leftovers.data;
  return (
    <>
      <PageHead title="Stores and registries" about={<NeedsAdmin what="Changing stores and registries" />} />
      <Panel
        title="Stores"
        aside={
          can("admin") ? (
            <button type="button" onClick={() => ask(addStore())}>
              Add a store
            </button>
          ) : null
        }
      >
        {stores.data ? (
          <ul class="stores">
            {stores.data.map((s) => (
              <StoreItem
                key={s.name}
                store={s}
                isSilent={unanswered.includes(s)}
                has={isKnown ? contents(s, stores.data ?? [], images, catalogs, leftovers.data ?? []) : null}
              />
            ))}
          </ul>
        ) : (
          <Pending error={stores.error} what="the stores" />
        )}
      </Panel>
      {stream ? (
        <Panel title="Cache of streamed images">
          <Gauge name="Cache" plane="base" used={stream.used_bytes} limit={stream.limit_bytes} />
          <Facts
            items={[
              ["In flight", `${count(stream.inflight)} chunks`],
              ["From registries", bytes(stream.counters.store_bytes ?? 0)],
              ["From other hosts", bytes(stream.counters.peer_bytes ?? 0)],
              ["Served without caching", `${count(stream.counters.passed_chunks ?? 0)} chunks`],
              ["Missing or damaged", `${count(stream.counters.wrong_chunks ?? 0)} chunks`],
            ]}
          />
        </Panel>
      ) : null}
      <Registries images={images} stores={(stores.data ?? []).map((s) => s.name)} />
      {leftovers.data?.length ? <Leftovers leftovers={leftovers.data} /> : null}
    </>
  );
}

function StoreItem({ store, isSilent, has }: { store: Store; isSilent: boolean; has: string[] | null }) {
  const { space } = store;
  const used = space ? space.total_bytes - space.free_bytes : 0;
  return (
    <li>
      <div class="counts">
        <strong>{store.name}</strong>
        <Badge>{store.class}</Badge>
        {space && space.level !== "normal" ? <Badge tone={space.level}>{space.level}</Badge> : null}
        {space ? null : <Badge tone="warning">not measured</Badge>}
        {space && isSilent ? <Badge tone="critical">no answer</Badge> : null}
        <code class="path">{store.path}</code>
      </div>
      {space ? (
        <>
          <div class="space">
            <progress
              aria-label={`Space used in ${store.name}`}
              max={Math.max(1, space.total_bytes)}
              value={used}
            />
            <span>
              {isSilent ? "last known: " : ""}
              <strong>{bytes(space.free_bytes)}</strong> free of {bytes(space.total_bytes)},{" "}
              {percent(used / Math.max(1, space.total_bytes), 0)} used
              {space.seconds_to_full == null
                ? ""
                : `; full in ${duration(space.seconds_to_full)} at the rate of the last minutes`}
            </span>
          </div>
          <p class="hint">{spaceText(store)}</p>
        </>
      ) : (
        <Notice tone="warning">{spaceText(store)}</Notice>
      )}
      {has === null ? (
        <p class="hint loading">Loading what is on it</p>
      ) : has.length ? (
        has.map((text) => <p key={text}>{text}</p>)
      ) : (
        <p class="hint">Holds no images or machine files.</p>
      )}
    </li>
  );
}
