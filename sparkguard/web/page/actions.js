// What a person asks of the supervisor. Its answer is told where it was asked: at the model.

import * as api from "./api.js";
import { confirmKill } from "./confirm.js";
import { fail, notice } from "./store.js";

async function ask(model, request) {
  notice(model, null);
  try {
    await request();
  } catch (error) {
    fail(error);
    if (error.status !== 401) notice(model, error.message);
  }
}

export const load = (model) => ask(model, () => api.load(model));
export const unload = (model) => ask(model, () => api.unload(model));

export async function kill(runner) {
  if (await confirmKill(runner)) await ask(runner.model, () => api.kill(runner.id));
}
