// The node's API.

let token = null;

export const hasToken = () => token !== null;

async function answered(response) {
  const told = await response.json().catch(() => ({ error: `status ${response.status}` }));
  if (!response.ok) throw Object.assign(new Error(told.error ?? `status ${response.status}`), { status: response.status });
  return told;
}

export async function get(path, query = {}) {
  const asked = new URLSearchParams(query).toString();
  const response = await fetch(`/api/v1/${path}${asked ? `?${asked}` : ""}`, { signal: AbortSignal.timeout(15000) })
    .catch(() => { throw new Error("this node does not answer"); });
  return answered(response);
}

// The token stays in this page's memory; a reload forgets it.
export async function act(path, told, given) {
  const bearer = given || token;
  const headers = { "Content-Type": "application/json", Authorization: `Bearer ${bearer}` };
  const response = await fetch(`/api/v1/${path}`, { method: "POST", headers, body: JSON.stringify(told) });
  if (response.status === 401) token = null;
  const done = await answered(response);
  token = bearer;
  return done;
}
