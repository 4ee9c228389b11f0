// Requests a part of the page; in a page that was saved as a file, the parts are in the file.

const held = document.querySelector("#parts");
const parts = held && JSON.parse(held.textContent);
export const isFile = parts !== null;

/** Returns the response at an address. "no-cache": the browser sends the entity tag that it has, and takes the body from
 * its own cache on a 304. */
export async function ask(address) {
  if (!isFile) return fetch(address, { cache: "no-cache", credentials: "same-origin" });
  const part = parts[address];
  return part === undefined ? new Response(null, { status: 404 }) : new Response(typeof part === "string" ? part : JSON.stringify(part));
}
