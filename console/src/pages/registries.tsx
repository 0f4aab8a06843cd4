// Registries that the host knows: what is at the address, which versions are there, and the acts on them.
//
// Invariant: of credentials only the path of their file is shown, as `spillway registry list` shows it.
import { useState } from "preact/hooks";
import { ask } from "../acts.ts";
import { api, type ImageDetails, type Schemas, words } from "../api/client.ts";
import { pullImage } from "../image-pulls.ts";
import { isWritable, type Registry } from "../image-words.ts";
import { addRegistry, collectGarbage, deleteInRegistry, removeRegistry } from "../registry-acts.ts";
import { href } from "../router.ts";
import { useList } from "../state/resource.ts";
import { can } from "../state/session.ts";
import { Badge, Empty, Notice, Panel, Pending } from "../ui/parts.tsx";
import { streamedFrom } from "./store-contents.ts";

type Check = Schemas["RegistryCheck"];
interface Here {
  /** Images of the host with their versions, once they are known. */
  images: ImageDetails[] | undefined;
  stores: string[];
}

export function Registries({ images, stores }: Here) {
  const registries = useList<Registry>("/v1/registries");
  return (
    <Panel
      title="Registries"
      aside={
        can("admin") ? (
          <button type="button" onClick={() => ask(addRegistry())}>
            Add a registry
          </button>
        ) : null
      }
    >
      {registries.data ? (
        registries.data.length ? (
          <ul class="stores">
            {registries.data.map((r) => (
              <RegistryItem key={r.name} registry={r} images={images} stores={stores} />
            ))}
          </ul>
        ) : (
          <Empty>There are no registries. Images of a registry are shared by many hosts.</Empty>
        )
      ) : (
        <Pending error={registries.error} what="the registries" />
      )}
    </Panel>
  );
}

function facts(r: Registry): string {
  const keys = r.require_signature?.length ?? 0;
  return [
    r.endpoint ? `endpoint ${r.endpoint}` : "",
    r.region ? `region ${r.region}` : "",
    r.credentials ? `credentials in the file ${r.credentials}` : "",
    r.single_writer ? "only this host pushes to it" : "",
    keys ? `only versions signed by ${keys === 1 ? "its key" : `one of its ${keys} keys`}` : "",
    isWritable(r) ? "" : "can only be read",
  ]
    .filter(Boolean)
    .join("; ");
}

function RegistryItem({ registry, images, stores }: Here & { registry: Registry }) {
  const { name } = registry;
  const [state, setState] = useState<"idle" | "busy" | Check | { error: string }>("idle");
  const check = async () => {
    setState("busy");
    try {
      setState((await api.post("/v1/registries/{name}/check", { path: { name } })).body);
    } catch (error) {
      setState({ error: words(error) });
    }
  };
  const streamed = images ? streamedFrom(name, images) : [];
  const about = facts(registry);
  return (
    <li>
      <div class="counts">
        <strong>{name}</strong> <code class="path">{registry.url}</code>
      </div>
      {about ? <p class="hint">{about}</p> : null}
      {can("admin") ? (
        <div class="acts">
          <button type="button" disabled={state === "busy"} onClick={() => void check()}>
            {state === "busy" ? "Checking" : `Check ${name}`}
          </button>
          {isWritable(registry) ? (
            <>
              <button
                type="button"
                aria-label={`Count garbage in ${name}`}
                onClick={() => ask(collectGarbage(name, false))}
              >
                Count garbage
              </button>
              <button
                type="button"
                aria-label={`Collect garbage in ${name}`}
                onClick={() => ask(collectGarbage(name, true))}
              >
                Collect garbage
              </button>
            </>
          ) : null}
          {images && streamed.length === 0 ? (
            <button
              type="button"
              class="danger-plain"
              aria-label={`Remove ${name}`}
              onClick={() => ask(removeRegistry(name))}
            >
              Remove
            </button>
          ) : null}
        </div>
      ) : null}
      {streamed.length ? (
        <p class="hint">It cannot be removed: {streamed.join(", ")} is streamed from it.</p>
      ) : null}
      <div aria-live="polite">
        {typeof state === "object" && "error" in state ? (
          <Notice tone="critical">{state.error}</Notice>
        ) : null}
        {typeof state === "object" && "images" in state ? (
          <Found
            check={state}
            registry={registry}
            images={images}
            stores={stores}
            again={() => void check()}
          />
        ) : null}
      </div>
    </li>
  );
}

/** What the check of a registry has found. */
function Found({
  check,
  registry,
  images,
  stores,
  again,
}: Here & { check: Check; registry: Registry; again(): void }) {
  const { name } = registry;
  const isHereAs = (details: ImageDetails[] | undefined, ref: string) => {
    const [image, version] = ref.split(":");
    return details?.some(
      (d) => d.image.name === image && d.versions.some((v) => String(v.version) === version),
    );
  };
  return (
    <>
      <Notice tone={check.is_registry ? "good" : "critical"}>
        {check.is_registry
          ? `${name} is a registry. ${check.can_write ? "It can be written" : "This host can only read it"}${check.can_list ? "." : ", and it does not list what it has: name a version with its number."}`
          : "There is no registry at the address: mount its folder, or remove it and add it with another address."}
      </Notice>
      {check.can_write && !check.can_create && !registry.single_writer ? (
        <Notice tone="warning">
          It has no conditional writes any more: two hosts that push at once could harm each other.
        </Notice>
      ) : null}
      {check.images.length ? (
        <div class="table-box">
          <table aria-label={`Versions in ${name}`}>
            <thead>
              <tr>
                <th scope="col">Version</th>
                <th scope="col">On this host</th>
                <th scope="col">Actions</th>
              </tr>
            </thead>
            <tbody>
              {check.images.map((ref) => {
                const isHere = isHereAs(images, ref);
                return (
                  <tr key={ref}>
                    <th scope="row">{ref}</th>
                    <td>
                      {isHere ? (
                        <a href={href(["images", ref.split(":")[0] ?? ref])}>a version of this name</a>
                      ) : (
                        <Badge>not here</Badge>
                      )}
                    </td>
                    <td>
                      <span class="acts">
                        <button
                          type="button"
                          aria-label={`Pull ${ref}`}
                          onClick={() =>
                            ask(pullImage([registry], stores, { from: { registry: name, image: ref } }))
                          }
                        >
                          Pull
                        </button>
                        {check.can_write ? (
                          <button
                            type="button"
                            class="danger-plain"
                            aria-label={`Delete there: ${ref}`}
                            onClick={() => ask(deleteInRegistry(name, ref, again))}
                          >
                            Delete there
                          </button>
                        ) : null}
                      </span>
                    </td>
                  </tr>
                );
              })}
            </tbody>
          </table>
        </div>
      ) : check.is_registry && check.can_list ? (
        <p class="hint">There is no version in it.</p>
      ) : null}
    </>
  );
}
