// Hook that reads a list at once, and again after each turn that ends.
import { useEffect, useState } from "../vendor/htm-preact.js";
import { ApiError, get } from "../api.js";

/** Return the rows of `path`, null before the first answer, and the last error; turns within `quietMs` are read once. */
export function useRowsByTurn(store, path, quietMs) {
  const [rows, setRows] = useState(null);
  const [error, setError] = useState(null);
  const lastTurn = store.turns.at(-1)?.turn;
  useEffect(() => {
    const abort = new AbortController();
    const timer = setTimeout(async () => {
      try {
        const { data } = await get(path, { signal: abort.signal });
        setRows(data);
        setError(null);
      } catch (caught) {
        if (caught instanceof ApiError) setError(caught);
      }
    }, rows ? quietMs : 0);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [lastTurn]);
  return [rows, error];
}
