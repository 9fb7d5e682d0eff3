// Questions to the server. A path is relative, so the token of the address goes along.

import { readPack } from "./pack.js";

export class Refused extends Error {}

async function ask(name, given) {
  const query = new URLSearchParams(Object.entries(given).filter(([, value]) => value !== undefined && value !== null));
  let answer;
  try {
    answer = await fetch(`api/${name}?${query}`);
  } catch {
    throw new Refused("whet view has ended: start it again, and open the address that it prints");
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  let words = text;
  try {
    words = JSON.parse(text).error ?? text;
  } catch {
    // the text itself
  }
  throw new Refused(words || `the server answered ${answer.status}`);
}

export const getJSON = async (name, given = {}) => (await ask(name, given)).json();
export const getPack = async (name, given = {}) => readPack(await (await ask(name, given)).arrayBuffer());

// An address of the page: address("groups", { run, rollout }).
export function address(view, given = {}) {
  const query = new URLSearchParams(Object.entries(given).filter(([, value]) => value !== undefined && value !== null && value !== ""));
  return `#/${view}${query.size ? `?${query}` : ""}`;
}
