// What each program under test says of itself: one line of JSON for each feature it tried.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { join } from "node:path";

export const url = process.env.FABRIC_URL;
export const v1 = `${url}/v1`;
export const model = process.env.FABRIC_MODEL;
export const key = "any";
export const hello = "Say hello.";
export const weatherQuestion = "What is the weather in Paris?";
export const cityQuestion = "Which city has how many people? Answer in the format.";
export const endless = "Count without an end.";
export const told = "My badge is 4711. ".repeat(40);
export const again = "Say hello again.";

export const weather = ({ city }) => `sunny in ${city}`;

// The packages lie in a folder of their own, not beside this file.
const require = createRequire(pathToFileURL(join(process.env.CLIENT_FOLDER, "index.js")));
export const load = (name) => import(pathToFileURL(require.resolve(name)));

export async function refused(ask) {
  try {
    await ask();
  } catch (error) {
    return `${error.name ?? error.constructor.name}: ${error.message}`;
  }
  return "nothing was raised";
}

export async function run(features) {
  const wanted = process.argv.slice(2);
  for (const [feature, ask] of Object.entries(features)) {
    if (wanted.length && !wanted.includes(feature)) continue;
    let line;
    try {
      line = { feature, result: (await ask()) ?? null };
    } catch (error) {
      line = { feature, error: String(error?.stack ?? error).slice(-3000) };
    }
    console.log(`\n${JSON.stringify(line)}`);
  }
}
