// Loads scripts of the console that few pages need, when one of them is shown.
//
// Invariant: a script that could not be loaded is loaded again when somebody asks for it, not by itself.
let failures = 0;

/** What a script of the console exports. */
export async function loadFile<T>(
  name: string,
  load: (address: string) => Promise<T> = (address) => import(address),
): Promise<T> {
  // Browsers keep the failure of an address for as long as the page lives, so the next attempt has another one.
  const address = new URL(failures ? `${name}?again=${failures}` : name, document.baseURI).href;
  try {
    return await load(address);
  } catch (error) {
    failures++;
    throw error;
  }
}
