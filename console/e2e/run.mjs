// All tests in a browser, in one process: the address that `spillway console` prints lets in one browser, once.
import "./behaviour.test.mjs";
import "./budget.test.mjs";
import "./images.test.mjs";
import "./pages.test.mjs";
import "./wrong.test.mjs";
